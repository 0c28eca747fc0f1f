"""Rewards of tests. Their processes import this module, so it imports nothing."""


def digits(completions, **columns):
    """Return the share of digits and signs among the characters, which an untrained policy often varies."""
    return [sum(32 <= ord(letter) < 64 for letter in text) / max(1, len(text)) for text in completions]
