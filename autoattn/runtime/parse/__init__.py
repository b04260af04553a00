"""From a caller's arguments to one problem and its operands; a caller's mistakes end here."""
