// All different media of a run, by kind, as a grid whose items are loaded when they come into sight.
import { useEffect, useRef, useState } from "preact/hooks";
import { isBundle, read, runPath } from "../data/client";
import type { MediaRow } from "../data/types";
import { link, setQuery } from "../route";
import { plural } from "../ui/format";
import { AudioPlayer } from "../media/audio";
import { Picture } from "../media/image";
import { VideoPlayer } from "../media/video";
import { useTitle } from "../ui/hooks";
import { Choice, Failure, Loading, Notice } from "../ui/parts";

const PAGE = 500;
const KINDS: [string, string][] = [
  ["", "All"],
  ["image", "Images"],
  ["audio", "Sounds"],
  ["video", "Films"],
];

interface Listing {
  media: MediaRow[];
  next: number | null;
}

export function MediaPage({ run, query }: { run: string; query: URLSearchParams }) {
  useTitle("Media", run);
  const [rows, setRows] = useState<MediaRow[] | null>(null);
  const [next, setNext] = useState<number | null>(null);
  const [error, setError] = useState<Error | null>(null);
  const load = (after: number | null) =>
    read<Listing>(`${runPath(run)}/media.json`, { after, limit: PAGE }).then(
      (part) => {
        setRows((before) => [...(after === null ? [] : (before ?? [])), ...part.media]);
        setNext(part.media.length === PAGE && !isBundle() ? part.next : null);
      },
      (reason: Error) => setError(reason),
    );
  useEffect(() => void load(null), [run]);
  const kind = query.get("kind") ?? "";
  const shown = (rows ?? []).filter((row) => !kind || row.kind === kind);
  const kinds = KINDS.filter(([name]) => !name || rows?.some((row) => row.kind === name));
  return (
    <>
      <div class="page-head">
        <h1>Media</h1>
        <p class="subtitle">{rows ? `${next === null ? "" : "the first "}${plural(rows.length, "different medium", "different media")}` : ""}</p>
        {kinds.length > 2 && <Choice label="Kind" options={kinds} value={kind} onChoose={(value) => setQuery({ kind: value })} />}
      </div>
      {error && <Failure error={error} what="The list of media" />}
      {!rows && !error && <Loading what="media" />}
      {rows && rows.length === 0 && <Notice>No image, sound or film is listed: the episodes had none, or the run is older than this list. Those of older runs stand in their episodes.</Notice>}
      <ul class="grid">
        {shown.map((row) => (
          <li key={row.sha256}>
            <Item run={run} row={row} />
          </li>
        ))}
      </ul>
      {next !== null && (
        <button type="button" onClick={() => void load(next)}>
          More media
        </button>
      )}
    </>
  );
}

function Item({ run, row }: { run: string; row: MediaRow }) {
  const place = useRef<HTMLDivElement>(null);
  const [near, setNear] = useState(false);
  useEffect(() => {
    const observer = new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && (setNear(true), observer.disconnect()), { rootMargin: "300px" });
    observer.observe(place.current!);
    return () => observer.disconnect();
  }, []);
  const properties = { run, sha256: row.sha256, entry: row };
  return (
    <div class={`tile ${row.kind}`} ref={place}>
      {row.missing && <Notice>Its file is gone from the run's folder.</Notice>}
      {near && !row.missing && row.kind === "audio" && <AudioPlayer {...properties} />}
      {near && !row.missing && row.kind === "image" && <Picture {...properties} />}
      {near && !row.missing && row.kind === "video" && <VideoPlayer {...properties} />}
      <p class="tile-foot">
        <code class="muted">{row.sha256.slice(0, 10)}</code>
        {row.trajectory_seq !== null && <a href={link(["runs", run, "trajectories", row.trajectory_seq])}>first in #{row.trajectory_seq}</a>}
      </p>
    </div>
  );
}
