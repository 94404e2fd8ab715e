from slora.core.engine_state import Histogram, HistogramCounts


def test_a_value_counts_in_the_first_bucket_that_reaches_it() -> None:
    histogram = Histogram((1, 2))
    for value, times in ((1.0, 1), (1.5, 2), (2.0, 1), (7.0, 3)):
        histogram.count(value, times)
    counts = histogram.read()
    assert counts == HistogramCounts((1.0, 2.0), (1, 3, 3), 27.0)
    assert counts.cumulate() == [("1.0", 1.0), ("2.0", 4.0), ("+Inf", 7.0)]
