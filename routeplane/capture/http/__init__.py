"""HTTP responses and rollouts turned into calls and records, and a server's side of them.

``openai`` reads whole responses, ``chunks`` streamed ones, ``gym`` rollouts of NeMo Gym, ``messages`` message logs of
NeMo RL: each has ``calls`` and ``records``. ``RouteMiddleware`` ships routes from a server, ``TicketStore`` gives out
the calls behind its tickets. Needs no web framework and no client library.
"""

from routeplane.capture.http import chunks, gym, messages, openai
from routeplane.capture.http.middleware import MiddlewareReport, RouteMiddleware
from routeplane.capture.http.tickets import TicketReport, TicketStore, issue_ticket

__all__ = [
    "MiddlewareReport",
    "RouteMiddleware",
    "TicketReport",
    "TicketStore",
    "chunks",
    "gym",
    "issue_ticket",
    "messages",
    "openai",
]
