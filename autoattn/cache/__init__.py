"""Cache files of winners: reading, writing, order of precedence, and what they hold."""
