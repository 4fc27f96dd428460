"""One reply: what is asked for, how its tokens are chosen, and how they become text."""
