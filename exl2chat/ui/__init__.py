"""The terminal: a Textual app that shows what the controller says and hands it what the user wants."""
