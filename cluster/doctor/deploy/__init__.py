"""Checks of the files that bring a cluster up: `ray up` cluster files, Serve configs, KubeRay manifests."""
