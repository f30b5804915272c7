"""The client's side of the Files and Batches API: this server's, or a hosted service's."""
