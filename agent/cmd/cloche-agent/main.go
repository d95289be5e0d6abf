// The program cloche-agent is process 1 of every sandbox. As /init of the
// initramfs it brings the machine up and then serves the agent protocol on
// its virtio port. With --listen it is an ordinary process that speaks the
// same protocol on a Unix socket, for tests. As `cloche-agent sftp` and
// `cloche-agent scp` it is a tool that commands of SSH sessions run.
package main

import (
	"flag"
	"fmt"
	"os"
	"slices"

	"cloche.dev/agent/internal/machine"
	"cloche.dev/agent/internal/scp"
	"cloche.dev/agent/internal/sftp"
	"cloche.dev/agent/internal/sys"
)

func main() {
	listen := flag.String("listen", "", "developer mode: serve on `unix:PATH` and leave the machine alone")
	root := flag.String("root-cgroup", "auto", "developer mode: cgroup2 `DIR` for commands, none, or auto")
	state := flag.String("state", "", "developer mode: keep services in `DIR`, and start what is there")
	version := flag.Bool("version", false, "print the version")
	if len(os.Args) > 1 && os.Getpid() != 1 {
		tool(os.Args[1], os.Args[2:])
	}
	flag.Parse()
	switch {
	case *version:
		fmt.Println(machine.Version)
	case *listen != "":
		if err := develop(*listen, *root, *state); err != nil {
			fmt.Fprintln(os.Stderr, "cloche-agent:", err)
			os.Exit(1)
		}
	case os.Getpid() == 1:
		run()
	default:
		fmt.Fprintln(os.Stderr, "cloche-agent: not process 1; use --listen unix:PATH")
		os.Exit(2)
	}
}

// tool runs one of the programs that work on the standard streams, if it is
// one, and ends with it.
func tool(name string, args []string) {
	switch name {
	case "sftp":
		sys.Batch()
		if err := sftp.Serve(sys.Raw(0), sys.Raw(1), slices.Contains(args, "plain-links")); err != nil {
			fmt.Fprintln(os.Stderr, "sftp:", err)
			os.Exit(1)
		}
		os.Exit(0)
	case "scp":
		sys.Batch()
		os.Exit(scp.Run(args, os.Stdin, os.Stdout))
	}
}
