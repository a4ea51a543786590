"""`python -m student.train`: the trainer. The only part of `student` that knows the ring."""
