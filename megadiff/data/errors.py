"""What is wrong with data, files or flags."""


class DataError(ValueError):
    """A file, flag or value of the data tools is wrong; the message says which and what to do."""
