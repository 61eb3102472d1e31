"""Who may do what on a server: certificates, tokens, tenants and their quotas."""
