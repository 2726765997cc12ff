"""Names, attributes and listings of the source: what is known, how fresh, and asking for more."""
