"""Hidden states: the target's inner states for every sample, lossless, verified, in a few large files."""
