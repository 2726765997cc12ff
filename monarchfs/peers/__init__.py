"""The nodes of a job as one cache: who owns a file, what the others have, and how it gets here."""
