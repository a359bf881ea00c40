"""Backward pass alone: attnkit, torch's SDPA and the naive way, on each case of the preset."""


def test_backward(record, case, implementation):
    record(case, "backward", implementation)
