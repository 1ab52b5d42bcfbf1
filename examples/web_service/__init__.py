"""A web service that writes reports: every report is an execution, and survives what happens to the service.

    pip install 'loomfast[examples]' && cd examples
    python -m web_service reports.db --port 8000
    curl -i localhost:8000/reports -H 'Idempotency-Key: k1' -d '{"topic": "looms", "sections": 3}'
    curl -N localhost:8000/reports/REPORT/events
    curl -i localhost:8000/reports/REPORT/approval -H 'Idempotency-Key: k2' -d '{"approved": true}'

Kill it at any moment and start it again: the report goes on where it was, and so does a client that
reconnects with the `Last-Event-ID` it saw, as every browser does by itself. docs/embedding.md says what to
look at.
"""
