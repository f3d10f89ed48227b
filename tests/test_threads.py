"""The limit on threads is there while it should be, and gone afterwards."""

from threading import Barrier, Thread

from threadpoolctl import threadpool_limits

from viper.inference.threads import one_thread, thread_pools


def blas_threads():
    return {pool["num_threads"] for pool in thread_pools().info() if pool["user_api"] == "blas"}


def test_overlapping_users_leave_the_pools_as_they_were():
    """The second comes while the first is in and leaves after it: what it found is not what was there."""
    second_in, first_out = Barrier(2), Barrier(2)

    def second():
        with one_thread():
            second_in.wait()
            first_out.wait()

    with threadpool_limits(limits=2):
        before = blas_threads()
        other = Thread(target=second)
        with one_thread():
            other.start()
            second_in.wait()
            assert blas_threads() == {1}
        first_out.wait()
        other.join()
        assert blas_threads() == before
