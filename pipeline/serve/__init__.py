"""The search API over HTTP, and the one package that knows HTTP.

    request ─▶ envelope ─▶ guard ─▶ route ─▶ encoder queue ─▶ searcher ─▶ answer
               deadline,   host,    typed    one pass for     its own     one generation,
               headers,    key,     bounded  all that wait    thread      named
               metrics     body
              └──── whatever goes wrong leaves as a problem (RFC 9457) ────┘

``app.create_app`` puts it together, ``server.run_server`` binds it. ``keys`` needs no web library.
"""
