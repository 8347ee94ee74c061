// The very bytes of a medium as a URL for an element, with the key where one is needed.
import { useEffect, useState } from "preact/hooks";
import { mediaUrl } from "../data/client";
import type { MediaEntry } from "../data/types";
import { number, seconds, size } from "../ui/format";

export interface MediaProperties {
  run: string;
  sha256: string;
  entry: MediaEntry;
}

export function useMediaUrl(address: string): { url: string | null; error: Error | null } {
  const [state, setState] = useState<{ url: string | null; error: Error | null }>({ url: null, error: null });
  useEffect(() => {
    const ended = new AbortController();
    let done = () => {};
    mediaUrl(address, ended.signal).then(
      (made) => {
        if (ended.signal.aborted) return made.done();
        done = made.done;
        setState({ url: made.url, error: null });
      },
      (error: Error) => !ended.signal.aborted && setState({ url: null, error }),
    );
    return () => (ended.abort(), done());
  }, [address]);
  return state;
}

/** What is known of a medium, in one line. */
export function mediaFacts(entry: MediaEntry): string {
  const facts = [
    entry.width && entry.height ? `${entry.width} × ${entry.height}` : "",
    entry.duration ? seconds(entry.duration) : "",
    entry.sampling_rate ? `${number(entry.sampling_rate / 1000)} kHz` : "",
    entry.fps ? `${number(entry.fps)} frames/s` : "",
    entry.mime ?? "",
    entry.size === null ? "" : size(entry.size),
  ];
  return facts.filter(Boolean).join(" · ");
}
