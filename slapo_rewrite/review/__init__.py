"""What a reviewer wants to see of an output: what was asked, what came of it, and why."""
