"""What ``monarchfs doctor`` looks at: can this machine mount, and how well.

Probes ask the machine and may hang; each is run in a child with a deadline (``run``). What they
found is judged by pure functions.
"""
