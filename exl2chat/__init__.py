"""exl2chat: chat in the terminal with EXL2 and GPTQ models. Importing this package costs milliseconds."""

__version__ = "0.1.0"
