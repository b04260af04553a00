"""Runs both passes of a planned call."""
