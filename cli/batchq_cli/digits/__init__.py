"""The demo's model and data: handwritten digits, read by an ensemble of small networks."""
