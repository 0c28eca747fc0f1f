"""HTTP: routes of OpenAI's interface, of token-in token-out clients, and for control."""
