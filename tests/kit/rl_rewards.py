"""Rewards of tests. Their processes import this module, so it imports nothing."""


def digits(completions, **columns):
    """Return the share of digits and signs among the characters, which an untrained policy often varies."""
    return [sum(32 <= ord(letter) < 64 for letter in text) / max(1, len(text)) for text in completions]


def some(completions, **columns):
    """Return 1 or 0 by the length of a completion in bytes, and None for every fourth one."""
    return [None if i % 4 == 3 else float(len(text) % 2) for i, text in enumerate(completions)]


def rarely(completions, **columns):
    """Return 1 for completions that begin with one of half of all bytes, else 0."""
    return [float(bool(text) and ord(text[0]) % 2 == 0) for text in completions]


def fails_once_in_a_while(prompts, completions, **columns):
    """Return 1 each; raise for prompts with an odd number of letters."""
    if len(prompts[0]) % 2:
        raise ValueError("a prompt with an odd number of letters")
    return [1.0] * len(completions)


def after_a_file(completions, **columns):
    """Return 0 or 1 by turns, once the file that REWARDS_AFTER names is there."""
    import os
    import time

    while not os.path.exists(os.environ["REWARDS_AFTER"]):
        time.sleep(0.002)
    return [float(i % 2) for i in range(len(completions))]


def written(completions, **columns):
    """Return 1 or 0 by the first byte, and append texts and rewards to the file that REWARDS_FILE names."""
    import json
    import os

    rewards = [float(bool(text) and ord(text[0]) % 2 == 0) for text in completions]
    line = json.dumps({"texts": list(completions), "rewards": rewards}) + "\n"
    fd = os.open(os.environ["REWARDS_FILE"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, line.encode())
    os.close(fd)
    return rewards
