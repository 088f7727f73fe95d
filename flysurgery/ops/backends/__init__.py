"""One way to multiply a file."""
