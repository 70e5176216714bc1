"""From prompts and a target model to a verified EAGLE-3 draft model, measured in a real engine."""

__version__ = "0.1.0"
