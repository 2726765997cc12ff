"""``monarchfs plan``: how much of a dataset fits where, and what that gains."""
