"""Drafters: suffix automaton and learned draft layer; drafts as chains and trees."""
