"""The changed entries of the page table."""

from jaxserve.paging.page_table import PageTableWrites


def test_entries_are_sent_once_in_order():
    table = PageTableWrites()
    table.put(2, 0, [7, 3])
    table.put(0, 5, [9])
    assert table.take() == [(2, 0, 7), (2, 1, 3), (0, 5, 9)]
    assert table.take() == []


def test_a_dropped_slot_sends_nothing():
    table = PageTableWrites()
    table.put(2, 0, [7])
    table.put(1, 0, [8])
    table.drop(2)
    assert table.take() == [(1, 0, 8)]
