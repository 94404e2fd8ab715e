import socket

import pytest

from slora_api.core.server_address import open_listener


def test_connections_send_data_without_waiting_for_an_ack() -> None:
    """Born from a bug: each answer on a kept-alive connection took 44 ms. For 43 ms of these it waited for an ACK."""
    with (
        open_listener("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()[:2]),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_kernel_buffers_little_for_a_client_that_does_not_read() -> None:
    """With the default size, the kernel buffers several megabytes before the server can notice a slow client."""
    with (
        open_listener("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()[:2]) as client,
        listener.accept()[0] as connection,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        num_bytes = 0
        with pytest.raises(BlockingIOError):
            while True:
                num_bytes += connection.send(bytes(65536))
        assert num_bytes < 2 << 20
