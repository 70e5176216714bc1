"""The draft model: its network, its objective, its data and its training."""
