"""The daemon behind ``batchq worker``: a parent that supervises, and child processes that run the model."""
