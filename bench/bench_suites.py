"""Every task of the preset by every implementation that can do it, one test each."""


def test_task(record, task, implementation):
    record(task, implementation)
