"""Linux for those above: threads, children with a time limit, memory, privileges, paths, logs."""
