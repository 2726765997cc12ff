"""What ``monarchfs plan`` works out: what of a dataset fits where, and what that brings."""
