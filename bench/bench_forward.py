"""Forward pass: attnkit, torch's SDPA and the naive way, on each case of the preset."""


def test_forward(record, case, implementation):
    record(case, "forward", implementation)
