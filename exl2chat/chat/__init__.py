"""A conversation: its tree, its file, its commands and the controller. No terminal and no tensor in sight."""
