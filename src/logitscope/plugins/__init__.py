"""What is loaded inside the processes of other engines: it must be light, and idle unless it is asked."""
