"""Hold one script per engine, which uses the standard library and the engine, never autosel. The question comes on
stdin, the reply goes to stdout."""
