"""What is done with tuned entries: verify them, pack them into a bundle."""
