"""How a front end reaches an engine: records over a pipe, or the same records in-process."""
