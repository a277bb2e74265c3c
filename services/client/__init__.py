"""Programs that talk to a server of the OpenAI API from outside: chat, bench and top."""
