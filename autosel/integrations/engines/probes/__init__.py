"""One script an engine: the standard library and the engine, never autosel. Question on stdin, reply on stdout."""
