"""What a mount saw, event by event: the file that ``monarchfs record`` writes."""
