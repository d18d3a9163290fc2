"""What a user does: capture, observe, edit, sweep, sites."""
