"""Slot memory on the host: one memfd a slot, so that a slot can be handed to another process without a name.

The student allocates the arena; every backend receives into it (zmq) or lets the teacher map it (shm). A memfd has no
name in /dev/shm, so nothing can leak when a process is killed; sealing it against shrinking keeps a truncation from
raising SIGBUS in the other process.
"""
