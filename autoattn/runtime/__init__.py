"""What runs a call: parse the arguments, plan, run, remember. It never imports the search."""
