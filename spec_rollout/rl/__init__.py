"""Reinforcement learning on rollouts: groups, rewards, advantages, policy losses, admission."""
