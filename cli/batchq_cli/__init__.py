"""The ``batchq`` command. Each of its commands is a file here, imported when it is used."""
