"""What serves files without Python on the way: C, and its thin binding."""
