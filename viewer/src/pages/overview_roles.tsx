// The run's processes with their health, restarts and log tails; and what the run has said, newest first.
import { useState } from "preact/hooks";
import { read, runPath } from "../data/client";
import type { RunEvent } from "../data/types";
import { ago, clock, count, DASH, size } from "../ui/format";
import { useLoad } from "../ui/hooks";
import { Loading, Notice, State } from "../ui/parts";

interface Role {
  name: string;
  kind?: string;
  pid?: number | null;
  host?: string;
  state?: string;
  restarts?: number;
  since?: number | null;
  log?: string | null;
}

interface Log {
  name: string;
  size: number;
  updated: number;
}

const SHOWN = 40; // events shown until asked for more

export function Roles({ run, status, expected }: { run: string; status: Record<string, unknown> | null; expected: boolean }) {
  const roles = Array.isArray(status?.roles) ? (status.roles as Role[]) : [];
  const { value } = useLoad((signal) => read<{ logs: Log[] }>(`${runPath(run)}/logs.json`, {}, signal), [run, roles.length]);
  const [chosen, setChosen] = useState<string | null>(null);
  const logs = value?.logs ?? [];
  const others = logs.filter((log) => !roles.some((role) => role.log === log.name));
  return (
    <>
      {roles.length === 0 && expected && <Notice>The run has not written down how its processes are. {logs.length > 0 && "Their logs are here:"}</Notice>}
      {roles.length > 0 && (
        <div class="scroll" role="region" aria-label="Table of roles" tabIndex={0}>
          <table>
            <thead>
              <tr>
                <th scope="col">Role</th>
                <th scope="col">State</th>
                <th scope="col" class="right">
                  Restarts
                </th>
                <th scope="col" class="right">
                  Since
                </th>
                <th scope="col">Log</th>
              </tr>
            </thead>
            <tbody>
              {roles.map((role) => (
                <tr key={role.name}>
                  <th scope="row" title={[role.host, role.pid && `process ${role.pid}`].filter(Boolean).join(", ")}>
                    {role.name}
                    {role.kind && role.kind !== role.name && <span class="muted"> {role.kind}</span>}
                  </th>
                  <td>
                    <State state={role.state ?? "unknown"} />
                  </td>
                  <td class="right">{role.restarts ? <span class="mark problem">{count(role.restarts)}</span> : <span class="muted">none</span>}</td>
                  <td class="right">{ago(role.since)}</td>
                  <td>{role.log ? <LogButton name={role.log} chosen={chosen} onChoose={setChosen} /> : <span class="muted">{DASH}</span>}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {others.length > 0 && (
        <p class="logs">
          {expected && "Logs: "}
          {others.map((log) => (
            <LogButton key={log.name} name={log.name} chosen={chosen} onChoose={setChosen} />
          ))}
        </p>
      )}
      {chosen && <LogTail run={run} name={chosen} />}
    </>
  );
}

function LogButton(properties: { name: string; chosen: string | null; onChoose: (name: string | null) => void }) {
  const { name, chosen, onChoose } = properties;
  return (
    <button type="button" class="log" aria-expanded={name === chosen} onClick={() => onChoose(name === chosen ? null : name)}>
      {name}
    </button>
  );
}

function LogTail({ run, name }: { run: string; name: string }) {
  const { value, error } = useLoad((signal) => read<{ name: string; size: number; text: string }>(`${runPath(run)}/logs/${encodeURIComponent(name)}.json`, {}, signal), [run, name]);
  if (error) return <Notice kind="problem">The log cannot be read: {error.message}</Notice>;
  if (!value) return <Loading what={name} />;
  return (
    <div class="tail">
      <p class="muted">
        End of {name}, {size(value.size)} in all
      </p>
      <pre tabIndex={0} role="region" aria-label={`End of ${name}`} ref={(element) => void (element && (element.scrollTop = element.scrollHeight))}>
        {value.text || "(empty)"}
      </pre>
    </div>
  );
}

export function Events({ events }: { events: RunEvent[] }) {
  const [all, setAll] = useState(false);
  if (events.length === 0) return <Notice>The run has said nothing yet, or is older than the file of events.</Notice>;
  const newest = [...events].reverse();
  const shown = all ? newest : newest.slice(0, SHOWN);
  return (
    <>
      <ol class="events" aria-label="Events, newest first">
        {shown.map((event) => (
          <li key={event.n} class={event.level}>
            <time>{clock(event.time)}</time>
            <span class="event-kind">{event.kind}</span>
            <div>
              {event.what}
              {event.advice && <p class="muted">{event.advice}</p>}
            </div>
          </li>
        ))}
      </ol>
      {newest.length > shown.length && (
        <button type="button" onClick={() => setAll(true)}>
          All {count(newest.length)} events
        </button>
      )}
    </>
  );
}
