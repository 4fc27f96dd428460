"""What is on disk: files to checked, frozen descriptions. No torch here."""
